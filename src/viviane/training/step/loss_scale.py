"""The loss scale of fp16: keeps small gradients from being rounded to zero, and finds the largest that fits."""

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
    """What the loss is multiplied by before backward, and gradients are divided by before the update.

    float16 has no number between 0 and 2^-24, and none above 65,504. With "dynamic" the scale begins at 2^16; a step
    whose gradients are not finite moves nothing and halves it, and 2,000 steps without one double it again, up to 2^24.
    A fixed scale is never changed.

    Args:
        setting: "dynamic", or the scale.

    Attributes:
        value: the scale.
        num_skipped: steps that moved nothing.
        held: the scale on the device, 0-dim, while a recorded step is run; else None.

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
        """What the present step multiplies its loss by."""
        return self.value if self.held is None else self.held

    def overflow(self, where: str) -> None:
        """Note that gradients of a step were not finite.

        Args:
            where: the step and its batch.

        Raises:
            NumericsError: the scale is fixed, or cannot be lower.
        """
        if not self.is_dynamic or self.value <= 1:
            what = f"gradients are NaN or infinite in float16 at a loss scale of {self.value:g}"
            fix = "set solver.loss_scale='dynamic' or a lower one" if not self.is_dynamic else (
                "weights are as the step before left them; lower lr or set clip_grad_norm, or train in bf16"
            )  # fmt: skip
            raise NumericsError(what, where=where, fix=fix)
        self.value /= 2
        self._good = 0
        self.num_skipped += 1
        _log.info("%s overflowed in float16 and moved nothing; the loss scale is %g now", where, self.value)

    def hold(self) -> None:
        """Note a step whose gradients were finite."""
        self._good += 1
        if self.is_dynamic and self._good >= INTERVAL and self.value < LARGEST:
            self.value *= 2
            self._good = 0

    def state(self) -> list[float]:
        """Return what a resumed run needs: the scale, and the good steps since it changed."""
        return [self.value, self._good]

    def restore(self, state: Any) -> None:
        """Go on from `state()`; a fixed scale stays what it was set to."""
        if self.is_dynamic and state is not None:
            self.value, self._good = float(state[0]), int(state[1])
