"""Mutations of captured and fused steps."""

# fmt: off
ROWS = (
    ("The last steps of a text, whose positions are clamped, need no graph of their own",
     "generation/compiled/fixed_steps.py", "tokens, positions.view_as(positions), mask", "tokens, positions, mask",
     "tests/generation/test_compiled.py::test_rows_of_any_lengths_share_one_graph"),
    ("Graphs of an earlier call are not replayed for a changed target", "generation/compiled/cuda_graphs.py",
     "    return hash(tuple(state))\n", "    return id(model)\n", "tests/generation/test_cuda_graphs.py"),
    ("Results of a graph lie outside of the memory that graphs share", "generation/compiled/cuda_graphs.py",
     "outputs = tree_map_only(torch.Tensor, torch.empty_like, results)", "outputs = results",
     "tests/generation/test_cuda_graphs.py"),
    ("A norm runs a fused kernel where both agree", "generation/compiled/fused_layers.py",
     "return best if steps[best] <= MOST_STEPS and", "return best if",
     "tests/generation/test_fused_layers.py::test_modules_that_compute_something_else_are_not_fused"),
    ("A rotation runs a fused kernel where both agree", "generation/compiled/fused_layers.py",
     "if all(_steps(*pair) <= MOST_STEPS for", "if form is ROTARY_FORMS[0] or any(pair is None for",
     "tests/generation/test_fused_layers.py::test_rotations"),
    ("Nothing sees an operation that is held back", "generation/compiled/fused_layers.py",
     "if func is F.linear and all(x is not held.result for x in (*args, *kwargs.values())):", "if func is F.linear:",
     "tests/generation/test_fused_layers.py::test_every_function_sees_what_was_held_back"),
    ("A fused kernel runs in the thread that captures alone", "generation/compiled/fused_layers.py",
     "if threading.get_ident() != thread:", "if False:",
     "tests/generation/test_fused_layers.py::test_other_threads_and_later_forwards_run_the_model_as_it_is"),
)
