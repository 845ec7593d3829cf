"""VGG16-BN on CIFAR-10 with 1,024 to 16,384 images per step, over the same 40 epochs.

Groups average as often per image at every size: after some 24,600 images, which AB's default is at 1,024.
"""

from setting import Setting

IMAGES = 50_000
SIZES = {1024: 24, 4096: 6, 16384: 2}
"""Images per step, and steps between averages."""
RATES: dict[str, tuple[float, ...]] = {"adamw": (3e-3, 6e-3, 1.2e-2), "lamb": (1e-2, 2e-2), "lars": (1.0, 2.0)}


def run(name: str, method: str, *fields: str, size: int, optimizer: str, lr: float) -> Setting:
    words = ("--batch-size", str(size), "--lr", str(lr))
    if optimizer != "adamw":  # the recipe's own
        words += ("--optimizer", optimizer)
    return Setting(
        f"{name}-{size}-{optimizer}-{lr:g}",
        method,
        fields,
        recipe="vgg16bn-cifar10",
        epochs=40,
        eval_every=max(8 * IMAGES // size // 2, 5),
        options=words,
    )


def allreduce(size: int, optimizer: str) -> list[Setting]:
    return [run("allreduce", "allreduce", size=size, optimizer=optimizer, lr=lr) for lr in RATES[optimizer]]


def groups(size: int, optimizer: str, *rates: float) -> list[Setting]:
    """AB at full rank."""
    fields = ("factor_at=none", f"every={SIZES[size]}")
    return [run("ab", "ab", *fields, size=size, optimizer=optimizer, lr=lr) for lr in rates or RATES[optimizer]]


def both(size: int) -> list[Setting]:
    ways = [allreduce(size, "adamw"), allreduce(size, "lamb"), allreduce(size, "lars")]
    return [setting for way in ways for setting in way] + groups(size, "adamw") + groups(size, "lamb", 1e-2)


SETS: dict[str, list[Setting]] = {
    "1k": [*allreduce(1024, "adamw")[:1], *groups(1024, "adamw", 3e-3)],
    "4k": both(4096),
    "16k": both(16384),
}
