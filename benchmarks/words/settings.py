"""What is compared, by sets."""

from pathlib import Path

from setting import Setting, by

CHEAP = ("warmup=0.05", "warmup_wire=lowrank:16")
MOMENTS = {
    "": (),
    "-estimate": ("second_moment=estimate",),
    "-shared8": ("second_moment=shared", "moments_wire=int8"),
    "-shared4": ("second_moment=shared", "moments_wire=int4"),
}


def gpt(name: str, method: str, *fields: str, lr: str = "2e-3") -> Setting:
    """Over the recipe's own 10 epochs, which are 2,550 steps, with 10 evaluations."""
    return Setting(name, method, fields, "gpt-wikitext2", eval_every=255, options=("--lr", lr))


def coded(wire: str) -> Setting:
    """All-reduce in a code."""
    return gpt(f"allreduce-{wire.replace(':', '')}", "allreduce", f"wire={wire}")


def local(every: int, moments: str, lr: str = "2e-3") -> Setting:
    at = "" if lr == "2e-3" else f"-lr{lr}"
    fields = (f"every={every}", "wire=int2", *CHEAP, *MOMENTS[moments])
    return gpt(f"localsgd-{every}{moments}{at}", "localsgd", *fields, lr=lr)


def diloco(every: int) -> Setting:
    return gpt(f"diloco-{every}", "diloco", f"every={every}", "wire=int2", "outer=1.0/0.5", *CHEAP)


def shakespeare(name: str, method: str, *fields: str) -> Setting:
    return Setting(f"shakespeare-{name}", method, fields, "shakespeare")


def longer(setting: Setting) -> Setting:
    """The same for the larger model, at its own rate."""
    recipe = f"{Path(__file__).parent / 'longer.py'}:gpt"
    return setting._replace(name=f"longer-{setting.name}", recipe=recipe, eval_every=1000, options=())


def seen(setting: Setting) -> Setting:
    """The same with rows of embeddings averaged by how often groups saw them."""
    return setting._replace(name=f"{setting.name}-seen", fields=(*setting.fields, "rows=seen"))


APART = [
    *(local(every, moments) for every in (2, 4, 8, 16, 24) for moments in MOMENTS),
    gpt("ab-default", "ab"),
    gpt("ab-full", "ab", "factor_at=none"),
]

SETS: dict[str, list[Setting]] = {
    "rates": [by(gpt(f"allreduce-lr{rate}", "allreduce", lr=f"{rate}e-3"), 1) for rate in (1, 1.4, 2, 2.8, 4)],
    "first": [
        local(8, "-shared8"),
        coded("lowrank:8"),
        local(2, "-estimate"),
        local(8, ""),
        local(4, "-shared4"),
        local(8, "-shared4"),
        seen(local(4, "-estimate")),
        local(12, "-shared8"),
        coded("lowrank:16"),
        local(16, "-shared4"),
        local(28, "-shared8"),
        local(2, ""),
        local(4, ""),
        seen(local(2, "-estimate")),
        coded("int2"),
        coded("lowrank:4"),
        coded("bit"),
        local(12, "-shared8", "2.8e-3"),
        local(12, "-shared8", "1.4e-3"),
        local(24, ""),
        seen(local(8, "-estimate")),
        seen(local(8, "")),
        local(8, "", "4e-3"),
        coded("int4"),
        seen(local(12, "-shared8")),
        coded("topk:0.01"),
        diloco(24),
        gpt("ab-full", "ab", "factor_at=none"),
        gpt("ab-full-shared8-none", "ab", "factor_at=none", "second_moment=shared", "outer=none"),
        local(24, "-estimate"),
        local(4, "-estimate"),
        gpt("ab-default", "ab"),
        local(24, "-shared4"),
        local(48, "-shared8"),
        gpt("powersgd-8", "powersgd", "rank=8", *CHEAP),
        gpt("onebit", "onebit", *CHEAP),
    ],
    "shakespeare": [
        by(shakespeare("allreduce", "allreduce"), 1),
        *(
            shakespeare(
                f"localsgd-{every}{moments}", "localsgd", f"every={every}", "wire=int2", *CHEAP, *MOMENTS[moments]
            )
            for every, moments in ((2, ""), (2, "-estimate"), (8, ""), (8, "-shared4"), (12, "-shared8"))
        ),
        shakespeare("lowrank4", "allreduce", "wire=lowrank:4"),
        shakespeare("lowrank2", "allreduce", "wire=lowrank:2"),
    ],
    "headline": [
        gpt("allreduce", "allreduce"),
        *(coded(wire) for wire in ("bit", "int2", "int4", "lowrank:4", "lowrank:8", "lowrank:16", "topk:0.01")),
        gpt("powersgd-8", "powersgd", "rank=8", *CHEAP),
        gpt("onebit", "onebit", *CHEAP),
    ],
    "longer": [
        longer(setting)
        for setting in (
            gpt("allreduce", "allreduce"),
            coded("lowrank:4"),
            local(24, ""),
            local(24, "-shared4"),
            local(48, "-shared4"),
            diloco(48),
        )
    ],
    "apart": [*APART, *(seen(setting) for setting in (*APART, diloco(24), diloco(48)))],
}
