"""What is compared, by sets."""

from pathlib import Path

from setting import Setting, by

FROZEN = ("warmup=0.15", "warmup_wire=lowrank:16", "freeze_second_moment=true")
"""1-bit Adam's warm-up, in a cheap code."""
CHEAP = ("warmup=0.05", "warmup_wire=lowrank:16")
MOMENTS = {
    "": ("second_moment=group",),
    "-estimate": ("second_moment=estimate",),
    "-estimate-seen": ("second_moment=estimate", "rows=seen"),
    "-shared": ("second_moment=shared",),
}


def gpt(name: str, method: str, *fields: str, lr: str = "2e-3") -> Setting:
    """Over the recipe's own 10 epochs, which are 2,550 steps, with 10 evaluations."""
    return Setting(name, method, fields, "gpt-wikitext2", eval_every=255, options=("--lr", lr))


def allreduce(lr: str = "2e-3") -> Setting:
    """By one worker with the whole batch: the same to rounding and dropout, in a tenth of the time that gloo takes."""
    return by(gpt(f"allreduce-lr{lr}", "allreduce", lr=lr), 1)


def coded(wire: str) -> Setting:
    """All-reduce in a code."""
    return gpt(f"allreduce-{wire.replace(':', '')}", "allreduce", f"wire={wire}")


def local(every: int, moments: str, lr: str = "2e-3", *more: str) -> Setting:
    fields = (f"every={every}", "wire=int2", *CHEAP, *MOMENTS[moments], *more)
    name = "-".join(
        [f"localsgd-{every}{moments}-lr{lr}", *(field.replace("=", "").replace("/", "-") for field in more)]
    )
    return gpt(name, "localsgd", *fields, lr=lr)


def diloco(every: int) -> Setting:
    return gpt(f"diloco-{every}", "diloco", f"every={every}", "wire=int2", "outer=1.0/0.5", *CHEAP)


def shakespeare(name: str, method: str, *fields: str) -> Setting:
    return Setting(f"shakespeare-{name}", method, fields, "shakespeare")


def shakespeare_local(every: int, moments: str) -> Setting:
    fields = (f"every={every}", "wire=int2", *CHEAP, *MOMENTS[moments])
    return shakespeare(f"localsgd-{every}{moments}", "localsgd", *fields)


def longer(setting: Setting) -> Setting:
    """The same for the larger model, at its own rate, and with a warm-up of as many steps."""
    recipe = f"{Path(__file__).parent / 'longer.py'}:gpt"
    fields = tuple("warmup=0.0125" if field == CHEAP[0] else field for field in setting.fields)
    return setting._replace(name=f"longer-{setting.name}", fields=fields, recipe=recipe, eval_every=1000, options=())


def pieces(setting: Setting, lr: str, dropout: str) -> Setting:
    """For the larger model at this rate and dropout, compiled; the model is kept, for test data."""
    recipe = f"{Path(__file__).parent / 'longer.py'}:dropout_{dropout[-1]}"
    name = f"pieces-{setting.name}-lr{lr}-dropout{dropout}"
    return setting._replace(name=name, recipe=recipe, eval_every=1000, options=("--lr", lr), keeps_model=True)


def pieces_allreduce(lr: str, dropout: str) -> Setting:
    return pieces(Setting("allreduce", "allreduce", (), "", workers=1), lr, dropout)


def rounds(every: int, lr: str, dropout: str, *more: str) -> Setting:
    """Groups that average this rarely in int2; later fields win."""
    usual = ("wire=int2", "outer=1.0/0.5", "warmup=0.0125", "warmup_wire=lowrank:2")
    fields = {field.partition("=")[0]: field for field in (f"every={every}", *usual, *more)}
    name = "-".join([f"rounds-{every}", *(field.replace("=", "").replace("/", "-") for field in more)])
    return pieces(Setting(name, "diloco", tuple(fields.values()), ""), lr, dropout)


SETS: dict[str, list[Setting]] = {
    "rates": [allreduce(f"{rate}e-3") for rate in (1, 1.4, 2, 2.8, 4)],
    "allreduce": [allreduce()],
    "headline": [local(3, "-shared"), local(4, "-shared"), local(4, "-shared", "2.4e-3", "every_max=32")],
    "search": [
        local(3, "-shared"),
        *(local(4, "-shared", lr) for lr in ("1.4e-3", "2e-3")),
        *(local(9, "-shared", lr) for lr in ("2e-3", "2.8e-3")),
        local(9, "-shared", "2.8e-3", "outer=1.0/0.3"),
        *(local(4, "-shared", lr, "every_max=32") for lr in ("2e-3", "2.4e-3", "2.8e-3")),
        local(4, "-shared", "2.8e-3", "every_max=64"),
        local(3, "-shared", "2.4e-3", "every_max=64"),
        local(16, "-shared", "2.8e-3"),
    ],
    "codes": [
        *(coded(wire) for wire in ("bit", "int2", "int4", "lowrank:4", "lowrank:8", "lowrank:16", "topk:0.01")),
        gpt("powersgd-8", "powersgd", "rank=8", *FROZEN[:2]),
        gpt("onebit", "onebit", *FROZEN[:2]),
        gpt("onebit-frozen", "onebit", *FROZEN),
        gpt("powersgd-8-frozen", "powersgd", "rank=8", *FROZEN),
    ],
    "apart": [
        *(local(every, moments) for every in (2, 4, 8, 16, 24) for moments in MOMENTS),
        diloco(24),
        diloco(48),
        gpt("ab-default", "ab"),
        gpt("ab-full", "ab", "factor_at=none"),
        gpt("ab-full-shared", "ab", "factor_at=none", *MOMENTS["-shared"]),
    ],
    "shakespeare": [
        shakespeare("allreduce", "allreduce"),
        *(shakespeare_local(2, moments) for moments in ("", "-estimate", "-shared")),
        *(shakespeare_local(4, moments) for moments in ("", "-shared")),
        shakespeare("onebit", "onebit", *FROZEN[:2]),
        shakespeare("onebit-frozen", "onebit", *FROZEN),
    ],
    "longer": [
        longer(setting)
        for setting in (
            allreduce(),
            local(24, ""),
            local(24, "-shared"),
            local(48, "-shared"),
            local(8, "-shared", "2e-3", "every_max=64"),
            diloco(48),
        )
    ],
    "pieces-rates": [
        *(pieces_allreduce(lr, dropout) for lr in ("1e-3", "2e-3") for dropout in ("0.3", "0.4", "0.5")),
        pieces_allreduce("7e-4", "0.4"),
        pieces_allreduce("1.4e-3", "0.5"),
    ],
    "pieces-rounds": [
        *(rounds(every, "1e-3", "0.3") for every in (12, 24, 48, 96, 192, 384)),
        rounds(96, "2e-3", "0.3"),
        *(rounds(96, "1e-3", dropout) for dropout in ("0.2", "0.4")),
        rounds(48, "1e-3", "0.3", "every_max=384"),
        rounds(36, "1e-3", "0.3", "every_max=288"),
        rounds(36, "1e-3", "0.3", "every_max=288", "outer=1.0/0.7"),
        *(rounds(96, "1e-3", "0.3", outer) for outer in ("outer=none", "outer=1.0/0.7", "outer=0.7/0.9")),
        *(rounds(every, "1e-3", "0.3", "wire=bit") for every in (96, 192)),
    ],
}
