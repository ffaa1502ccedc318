"""Mutations of what drafts share."""

# fmt: off
ROWS = (
    ("The draft's own window ends where it was trained to end", "modeling/shared/beams.py",
     "seen = stored > query - window", "seen = stored > -1", "tests/modeling/longspec/test_generation_longspec.py"),
    ("d2t holds offsets", "modeling/shared/vocabulary.py",
     "torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t", "self.d2t",
     "tests/modeling/eagle3/test_generation_eagle3.py::test_tokens_outside_of_the_drafts_vocabulary_are_counted"),
    ("Entries of accepted nodes have the target's own states", "modeling/shared/aux_drafter.py",
     "aux_hidden_states = hidden.gather(1, path[..., None]",
     "aux_hidden_states = hidden.gather(1, torch.zeros_like(path)[..., None]",
     "tests/modeling/eagle3/test_generation_eagle3.py::test_drafting_is_a_forward_over_the_text"),
    ("Chunks of a prompt follow one another", "modeling/shared/aux_drafter.py",
     "        self._read[place] += states.shape[1]\n", "",
     "tests/modeling/eagle3/test_generation_eagle3.py::test_auxiliary_states_are_hidden_states"),
)
