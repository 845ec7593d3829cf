"""Models of images, sound and video: convolutions of every kind."""

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import WIDE, images, shape


@shape("u-net", batch=images)
class UNet(nn.Module):
    """Down, up, a skip; transposed and grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.fuse = nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        low = F.silu(self.norm(self.grouped(F.silu(self.down(x)))))
        return self.head(F.silu(self.fuse(torch.cat([x, self.up(low)], 1))))


class Depthwise(nn.Module):
    """A ConvNeXt block: depthwise, norm, wide and back, a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDE, 2, 2)
        self.depthwise = nn.Conv2d(WIDE, WIDE, 3, padding=1, groups=WIDE)
        self.norm = nn.LayerNorm(WIDE)
        self.wide, self.back = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.gamma, self.head = nn.Parameter(torch.full((WIDE,), 0.1)), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.back(F.gelu(self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.head((x + (self.gamma * inner).permute(0, 3, 1, 2)).mean((2, 3)))


shape("depthwise", batch=images)(Depthwise)


@shape("one dimension", batch=lambda rng: torch.randn(3, 4, 16, generator=rng))
def one_dimension() -> nn.Module:
    """Dilated and circular convolutions over time."""
    return nn.Sequential(
        nn.Conv1d(4, 16, 3, padding=2, dilation=2), nn.InstanceNorm1d(16, affine=True, track_running_stats=True),
        nn.PReLU(), nn.Conv1d(16, 32, 3, padding=1, padding_mode="circular"), nn.GLU(1),
        nn.ConvTranspose1d(16, 16, 3), nn.Conv1d(16, 16, 3, padding="same"), nn.Conv1d(16, 2, 1),
    )  # fmt: skip


@shape("three dimensions", batch=lambda rng: torch.randn(2, 2, 4, 6, 6, generator=rng))
def three_dimensions() -> nn.Module:
    """Video."""
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 16, (1, 3, 3)), nn.ReLU(),
        nn.Conv3d(16, 16, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@shape("channels last", batch=lambda rng: images(rng).to(memory_format=torch.channels_last))
def channels_last() -> nn.Module:
    """Weights whose memory is not in the order of their dimensions."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 24), nn.Linear(24, 5),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)
