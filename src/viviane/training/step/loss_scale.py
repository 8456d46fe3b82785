"""The loss scale of fp16: keeps small gradients from underflow, and adapts to overflows."""

from __future__ import annotations

from typing import Any, Final, Literal

from torch import Tensor

from viviane.core.errors import NumericsError
from viviane.core.logging import get_logger

_log = get_logger("training.loss_scale")
FIRST: Final = 2.0**16
LARGEST: Final = 2.0**24
INTERVAL: Final = 2000


class LossScale:
    """The factor that multiplies the loss before backward and divides the gradients before the update.

    float16 has no values between 0 and 2^-24, and none above 65,504. With "dynamic" the scale begins at 2^16; a step
    with non-finite gradients updates nothing and halves it, and 2,000 steps without one double it again, up to 2^24.
    A fixed scale never changes.

    Args:
        setting: "dynamic", or a fixed scale.

    Attributes:
        value: the current scale.
        num_skipped: number of steps that updated nothing.
        held: the scale on the device, 0-dim, while a captured step runs; otherwise None.

    Example:
        >>> scale = LossScale("dynamic")
        >>> scale.overflow("step 1"); scale.value, scale.num_skipped
        (32768.0, 1)

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    def __init__(self, setting: float | Literal["dynamic"]) -> None:
        self.is_dynamic = setting == "dynamic"
        self.value = FIRST if setting == "dynamic" else float(setting)
        self.num_skipped = 0
        self.held: Tensor | None = None
        self._good = 0

    @property
    def factor(self) -> float | Tensor:
        """The factor of the loss in the current step."""
        return self.value if self.held is None else self.held

    def overflow(self, where: str) -> None:
        """Record that gradients of a step were not finite.

        Args:
            where: the step and its batch.

        Raises:
            NumericsError: the scale is fixed, or cannot be lowered further.
        """
        if not self.is_dynamic or self.value <= 1:
            what = f"gradients are NaN or infinite in float16 at a loss scale of {self.value:g}"
            fix = "set solver.loss_scale='dynamic' or a lower value" if not self.is_dynamic else (
                "weights are unchanged since the previous step; lower lr or set clip_grad_norm, or train in bf16"
            )  # fmt: skip
            raise NumericsError(what, where=where, fix=fix)
        self.value /= 2
        self._good = 0
        self.num_skipped += 1
        _log.info("%s overflowed in float16 and updated nothing; the loss scale is now %g", where, self.value)

    def hold(self) -> None:
        """Record a step whose gradients were finite."""
        self._good += 1
        if self.is_dynamic and self._good >= INTERVAL and self.value < LARGEST:
            self.value *= 2
            self._good = 0

    def state(self) -> list[float]:
        """Return the state for a resume: the scale, and the number of finite steps since it changed."""
        return [self.value, self._good]

    def restore(self, state: Any) -> None:
        """Restore `state()`; a fixed scale keeps its setting."""
        if self.is_dynamic and state is not None:
            self.value, self._good = float(state[0]), int(state[1])
