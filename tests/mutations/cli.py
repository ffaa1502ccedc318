"""Mutations of commands."""

# fmt: off
ROWS = (
    ("A text that is not lossless is status 1", "cli/audit.py", "return verdict == NOT_LOSSLESS", "return False",
     "tests/cli/test_audit.py"),
    ("A wrong text in a benchmark is status 1", "cli/bench.py", "return int(any(row", "return 0 * int(any(row",
     "tests/cli/test_bench.py::test_a_wrong_text_is_the_exit_status"),
    ("A diverged training is status 1", "cli/train.py", "        return 1\n", "        return 0\n",
     "tests/cli/test_train.py::test_a_diverged_run_has_its_own_exit_status"),
    ("A user's error is status 2", "cli/options.py", "typer.Exit(INPUT_ERROR)", "typer.Exit(1)",
     "tests/cli/test_errors.py::test_one_line_names_what_is_wrong"),
    ("Ctrl-C is status 130", "cli/options.py", "typer.Exit(INTERRUPTED)", "typer.Exit(INPUT_ERROR)",
     "tests/cli/test_errors.py::test_what_ends_a_command_while_it_works"),
    ("A text that Ctrl-C ended is status 130", "cli/generate.py", "options.INTERRUPTED if stats.interrupted else 0",
     "0", "tests/cli/test_generate.py::test_an_interrupted_text_stays"),
    ("A served prompt continues what a finished call has left alone", "cli/serving/answers.py",
     "held, self._tokens = self._tokens, self._tokens[:0]",
     "held, self._tokens = self._tokens, prompt[0].cpu()",
     "tests/cli/test_serve_isolation.py"),
)
