"""A mini ViT on CIFAR-10 by any method, with the settings of OIALR's ablation (dissertation, section 4.4.4, Table A.2).

python benchmarks/mini_vit_cifar10.py --data DIR --method allreduce --preset baseline --json FILE
python benchmarks/mini_vit_cifar10.py --data DIR --method oialr --preset tuned --set cutoff=0.2 --json FILE
torchrun --nproc-per-node 4 benchmarks/mini_vit_cifar10.py --data DIR --method ab --epochs 40 --json FILE

Images are augmented on the device, each by itself, as timm does it on the host: a resized crop, a flip, two of
RandAugment's operations (`rand-m9-mstd0.5-inc1`) and erasing. DIR is as for vgg16_cifar10.py.
"""

import argparse

import cifar10
import torch

from thinwire.comm.topology import join
from thinwire.train.models import ViT
from thinwire.train.schedule import Cosine, scheduled
from thinwire.train.views import CIFAR10, Pictures

PRESETS = {
    "baseline": {"lr": 1e-4, "min_lr": 1e-5, "warmup_lr": 1e-5, "k_decay": 1.0, "warmup_epochs": 10.0},
    "tuned": {"lr": 2e-4, "min_lr": 8e-4, "warmup_lr": 8e-5, "k_decay": 0.4, "warmup_epochs": 17.0},
}
"""Table A.2's learning rates; the tuned ones rise as the trained parameters become fewer."""
VIEWS = Pictures(statistics=CIFAR10, scale=(0.8, 1.0), rand_augment=9, erase=0.25)
MINI = {"image": 32, "patch": 8, "depth": 6, "heads": 6, "qkv_bias": False, "drop_path": 0.2}
"""ViT-B with patches of 8, six blocks and six heads: 42.7 M parameters."""


def main() -> None:
    """One run."""
    options = _options()
    join()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    train, (x, y) = cifar10.load(options)
    test = VIEWS.heldout(x), y
    per_epoch = len(train[0]) // options.batch
    steps = options.epochs * per_epoch
    model = ViT(classes=10, **MINI).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.decay)
    scheduler = scheduled(optimizer, _course(options), steps=steps, epochs=options.epochs)
    replica = cifar10.attach(model, optimizer, options, steps)
    torch.manual_seed(options.seed * 1000 + replica.topology.rank)  # workers drop paths of their own
    history = cifar10.fit(replica, optimizer, scheduler, train, test, options, views=VIEWS)
    names = ("preset", *PRESETS["baseline"], "warmup_prefix", "decay")
    cifar10.all_gather_object(replica, history, test, {name: getattr(options, name) for name in names}, steps)


def _course(options: argparse.Namespace) -> Cosine:
    """timm's cosine: it counts from the first step, and so begins some way down (or up) after the warm-up."""
    return Cosine(
        warmup=options.warmup_epochs / options.epochs,
        floor=options.min_lr / options.lr,
        start=options.warmup_lr / options.lr,
        k_decay=options.k_decay,
        from_zero=not options.warmup_prefix,
    )


def _options() -> argparse.Namespace:
    parser = cifar10.parser(__doc__, epochs=245)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="baseline", help="learning rates not given")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--min-lr", type=float, help="the last one; it may be the highest")
    parser.add_argument("--warmup-lr", type=float, help="the first one")
    parser.add_argument("--k-decay", type=float, help="below 1 the cosine hurries at first, above 1 at last")
    parser.add_argument("--warmup-epochs", type=float, help="of --paper-epochs: a shorter run has a shorter warm-up")
    parser.add_argument("--paper-epochs", type=float, default=245)
    parser.add_argument("--keep-warmup", action="store_true", help="the same warm-up, however short the run")
    parser.add_argument("--warmup-prefix", action="store_true", help="count the cosine's steps from the warm-up's end")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay")
    options = parser.parse_args()
    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.keep_warmup:
        options.warmup_epochs *= min(1, options.epochs / options.paper_epochs)
    return options


if __name__ == "__main__":
    main()
