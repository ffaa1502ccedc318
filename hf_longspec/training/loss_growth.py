"""A run whose loss grows is stopped: at too large a learning rate a draft unlearns what it has learned."""

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from .checkpoints import complete_checkpoints

# A mean is that of the entries of the log over this many steps, and of at least three. A step may hold a few rows only,
# whose losses differ by half.
STEPS, ENTRIES = 50, 3
# A run ends if the mean is larger than the best one times the first factor. A run that diverges from the beginning has
# no better one: after the warm-up, the mean must not be larger than that of the first 20 steps times the second factor.
OVER_BEST, OVER_FIRST, FIRST_STEPS = 1.5, 1.25, 20
# From this factor on, the last checkpoint from before is not replaced by newer ones.
OVER_KEPT = 1.1


class LossGrowth(TrainerCallback):
    """Stops a run whose smoothed loss has grown clearly, and keeps the last checkpoint from before.

    Raises:
        FloatingPointError: If the loss has grown. The message has a lower learning rate, and names the checkpoint.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the entries of the run that is resumed."""
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.best, self.best_step = float("inf"), 0
        self.warmup_steps = args.get_warmup_steps(state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Compare the mean of the last entries with the best one."""
        if "loss" not in (logs or {}):
            return
        self.losses.append(float(logs["loss"]))  # type: ignore[index]
        every = max(1, state.logging_steps)
        count = max(ENTRIES, -(-STEPS // every))
        if len(self.losses) < count:
            return
        mean = mean_of(self.losses[-count:])
        if mean < self.best:
            self.best, self.best_step = mean, state.global_step
        first = mean_of(self.losses[: -(-FIRST_STEPS // every)])
        diverged = mean > OVER_FIRST * first and state.global_step > self.warmup_steps
        if mean > OVER_BEST * self.best or diverged:
            kept = self._last_good(args)
            raise FloatingPointError(
                f"the loss has grown from {min(self.best, first):.3g} to {mean:.3g} at step {state.global_step}: lower "
                f"learning_rate from {args.learning_rate:g} to {args.learning_rate / 4:.1g}. "
                + (f"The last checkpoint from before is {kept}." if kept else "No checkpoint was saved before it grew.")
            )
        if args.metric_for_best_model is None:  # else `Trainer` keeps the best one by that
            state.best_model_checkpoint = self._last_good(args) if mean > OVER_KEPT * self.best else None

    def _last_good(self, args: Any) -> str | None:
        """Return the last checkpoint that was written when the mean was the best, or before."""
        good = [folder for step, folder in complete_checkpoints(args.output_dir) if step <= self.best_step]
        return str(good[-1]) if good else None


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)
