"""VGG16-BN on CIFAR-10 by any method: accuracy, bytes and size, with the AB paper's optimizer settings.

torchrun --nproc-per-node 4 benchmarks/vgg16_cifar10.py --data DIR --method ab --epochs 40 --json FILE
torchrun --nproc-per-node 4 benchmarks/vgg16_cifar10.py --data DIR --method topk --optimizer sgd --lr 0.1 --json FILE

DIR holds cifar-10-batches-py, or cifar10_train_1.npz … cifar10_train_5.npz and cifar10_test.npz. Several workers may
share one GPU: gloo then carries CUDA tensors through the host, which costs time and changes nothing else.
"""

import argparse

import cifar10
import torch
from torch import nn

from thinwire.comm.topology import join
from thinwire.train.models import VGG16BN
from thinwire.train.schedule import Cosine, scheduled
from thinwire.train.views import CIFAR10, Pictures

CLIP = 1.0
VIEWS = Pictures(statistics=CIFAR10, pad=4)
USUAL = {"adamw": (3e-3, 0.1), "sgd": (0.1, 5e-4)}
"""Learning rate and weight decay where none are given: the AB paper's, and what VGGs on CIFAR-10 usually have."""


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
    model = VGG16BN().to(device)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
    optimizer = _optimizer(model, options)
    rising = steps / 15 if options.warmup_epochs is None else options.warmup_epochs * per_epoch
    course = Cosine(warmup=rising / steps)
    scheduler = scheduled(optimizer, course, steps=steps, epochs=options.epochs)
    replica = cifar10.attach(model, optimizer, options, steps, clip=CLIP)
    history = cifar10.fit(replica, optimizer, scheduler, train, test, options, views=VIEWS, clip=CLIP)
    settings = {name: getattr(options, name) for name in ("optimizer", "lr", "decay", "warmup_epochs")}
    cifar10.all_gather_object(replica, history, test, settings, steps)


def _optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=options.lr, weight_decay=options.decay, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.decay)


def _options() -> argparse.Namespace:
    parser = cifar10.parser(__doc__, epochs=40)
    parser.add_argument("--optimizer", choices=sorted(USUAL), default="adamw")
    parser.add_argument("--lr", type=float, help="highest learning rate; 3e-3 for adamw, 0.1 for sgd if not given")
    parser.add_argument("--decay", type=float, help="weight decay; 0.1 for adamw, 5e-4 for sgd if not given")
    parser.add_argument("--warmup-epochs", type=float, help="epochs over which it rises; a 15th if not given")
    options = parser.parse_args()
    lr, decay = USUAL[options.optimizer]
    options.lr = lr if options.lr is None else options.lr
    options.decay = decay if options.decay is None else options.decay
    return options


if __name__ == "__main__":
    main()
