"""Scale the loss for --dtype float16, which has no numbers below 6e-8 or above 65504.

Small gradients would round to 0. So the loss is multiplied by a scale, and the float32 gradients
are divided by it before the optimizer's step. torch's GradScaler adapts the scale: it begins with
65536, and halves it if a gradient is infinite or NaN. It also skips that optimizer step.
"""

import sys

import torch

from runtime import folders
from runtime.processes import DEVICE, RANK

LEAST_SCALE = 1.0  # a lower scale makes gradients smaller than they are without scaling


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler for one optimizer. In other dtypes than float16 it changes nothing."""

    def __init__(self, args):
        super().__init__(DEVICE.type, enabled=args.dtype == "float16")
        self.run_dir = args.run_dir

    def step(self, optimizer):
        """Make the optimizer's step, or skip it after an overflow, and update the scale.

        All processes do the same. If the scale falls below LEAST_SCALE, the program ends (exit code
        1). Halved until it is 0, the scale would make every weight NaN in the next finite update.
        """
        super().step(optimizer)
        before = self.get_scale()
        self.update()
        scale = self.get_scale()
        if scale < LEAST_SCALE:
            sys.exit(
                f"error: gradients overflow in float16, even at a loss scale of {scale:g}. This "
                "update was not applied. Try --dtype bfloat16 or float32, or a lower --lr; "
                f"{folders.how_to_go_on(self.run_dir)}"
            )
        if scale < before and RANK == 0:
            print(f"overflow in float16: an update was skipped; the loss's scale is now {scale:g}")

    def state(self):
        """Return the scale and the updates since it changed, as a tensor [2] for a checkpoint."""
        state = self.state_dict()
        return torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float32)

    def load_state(self, tensor):
        """Restore the tensor that state returned."""
        scale, tracker = tensor.tolist()
        self.load_state_dict(self.state_dict() | {"scale": scale, "_growth_tracker": int(tracker)})


def scaler(optimizer, args):
    """Return the optimizer's Scaler, the same one at each call."""
    if not hasattr(optimizer, "scaler"):
        optimizer.scaler = Scaler(args)
    return optimizer.scaler
