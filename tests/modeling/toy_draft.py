"""A draft as another package would write it: it proposes the token that followed the root the last time."""

from typing import ClassVar

import torch

import hf_longspec


class ToyConfig(hf_longspec.DraftConfig):
    model_type = "toy"


class ToyDrafter(hf_longspec.Drafter):
    num_nodes, max_depth = 2, 1

    def start(self, texts, verification):
        self.texts = [text.tolist() for text in texts]
        for text, tokens in zip(self.texts, verification.tokens, strict=True):
            text += tokens

    def observe(self, verification):
        for text, tokens in zip(self.texts, verification.tokens, strict=True):
            text += tokens

    def propose(self, root):
        follower = [self.after(text, int(token)) for text, token in zip(self.texts, root, strict=True)]
        tokens = torch.stack([root, torch.tensor(follower, device=root.device)], dim=1)
        parents = torch.tensor([[-1, 0]], device=root.device).expand_as(tokens)
        return hf_longspec.DraftTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool), is_chain=True)

    def after(self, text, token):
        places = [place for place in range(len(text) - 1) if text[place] == token]
        return text[places[-1] + 1] if places else token


class ToyDraftModel(hf_longspec.DraftModel):
    config_class = ToyConfig
    weightless: ClassVar[bool] = True
    settings: ClassVar[dict] = {"politeness": 1}

    def make_drafter(self, binding):
        return ToyDrafter(binding)

    def max_nodes(self, target):
        return 2
