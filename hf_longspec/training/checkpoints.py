"""The checkpoints that a run wrote to its output folder."""

from pathlib import Path


def complete_checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """Return step and folder of all complete checkpoints, oldest first. `Trainer` writes trainer_state.json last."""
    folders = [path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    numbers = [(path.name.removeprefix("checkpoint-"), path) for path in folders]
    return sorted((int(number), path) for number, path in numbers if number.isdigit())


def last_complete_checkpoint(folder: str | Path) -> str:
    """Return the newest complete checkpoint in `folder`."""
    if not (complete := complete_checkpoints(folder)):
        raise ValueError(f"{str(folder)!r} has no complete checkpoint to resume from: start without resuming.")
    return str(complete[-1][1])
