"""Stand-ins for OIALR's mini-ViT and Autoformer, for a CPU: as deep, and a sixteenth as wide.

thinwire tune benchmarks/tuning/stand_in.py:mini_vit --method oialr --space benchmarks/tuning/stand_in.toml
"""

from functools import partial

from torch import Tensor, nn
from torch.optim import AdamW

from thinwire.experiments import series
from thinwire.experiments.models.vision import ViT
from thinwire.recipes import Recipe, digits
from thinwire.train.schedule import Cosine
from thinwire.train.task import MethodOverrides


class Grey(nn.Module):
    """The ViT for colour images, on grey ones."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = ViT(classes=10, image=8, patch=2, width=48, depth=6, heads=6, qkv_bias=False, drop_path=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x.expand(-1, 3, -1, -1))


def mini_vit() -> Recipe:
    """20 epochs, with Table A.2's settings as shares of the run; its rate 16 times as high, for the narrower model."""
    steps = 400
    return digits().replace(
        name="stand-in",
        model=lambda source: Grey(),
        optimizer=partial(AdamW, lr=1.6e-3),
        clip=None,
        steps=steps,
        epochs=20,
        eval_every=50,
        rate=Cosine(warmup=10 / 300, floor=0.1, start=0.1, from_zero=True),
        suited={"oialr": MethodOverrides({"factor_at": 4000 / 14648, "redecompose": 1000 / 14648, "cutoff": 0.2})},
    )


def autoformer() -> Recipe:
    """Half a pass over ETTm2, 96 ahead, with the tuned recipe's rates; over more the error on test data rises."""
    steps = 537
    return series.autoformer_tuned(width=32, hidden=128).replace(
        name="stand-in-autoformer",
        steps=steps,
        epochs=1,
        epochs_are_passes=False,
        eval_every=steps,
        patience=None,
    )
