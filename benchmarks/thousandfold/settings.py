"""What is compared: four groups that average rarely, at full rank or with AB's factors, and all-reduce."""

from pathlib import Path

from setting import Setting

EPOCHS, EVAL_EVERY = 150, 732
WARM = ("warmup=0.02", "warmup_wire=lowrank:2")
"""146 steps in 0.00013 of all-reduce's bytes."""


def vgg(name: str, method: str, *fields: str) -> Setting:
    return Setting(name, method, fields, "vgg16bn-cifar10", epochs=EPOCHS, eval_every=EVAL_EVERY)


def rounds(name: str, every: int, *fields: str, warm: tuple[str, ...] = WARM) -> Setting:
    """Groups that average every so many steps in int2, with AB's outer step for four groups; later fields win."""
    chosen = {field.partition("=")[0]: field for field in ("wire=int2", "outer=1.0/0.5", *warm, *fields)}
    return vgg(f"rounds-{name}", "diloco", f"every={every}", *chosen.values())


def factored(every: int, target: int) -> Setting:
    """AB with such a warm-up: full rank in such rounds, and factors of this compression from three quarters on."""
    return vgg(f"ab-{every}-target{target}", "ab", f"every={every}", f"target={target}", *WARM)


ALLREDUCE = vgg("allreduce-by-one", "allreduce")._replace(
    recipe=f"{Path(__file__).parent / 'one_worker.py'}:vgg16_bn", workers=1
)

SETS: dict[str, list[Setting]] = {
    "allreduce": [ALLREDUCE],
    "every": [rounds(str(every), every) for every in (48, 96, 192, 384)],
    "variants": [
        rounds("96-cold", 96, warm=("warmup=0",)),
        rounds("96-estimate", 96, "second_moment=estimate", "outer=none"),
        rounds("48-bit", 48, "wire=bit"),
        rounds("48-grow-384", 48, "every_max=384"),
    ],
    "bits": [
        rounds("96-bit", 96, "wire=bit"),
        rounds("192-bit", 192, "wire=bit"),
        rounds("48-bit-grow-384", 48, "wire=bit", "every_max=384"),
    ],
    "factored": [factored(every, 5) for every in (24, 48, 96)],
}
