"""`thinwire store`: where groups meet that may come and go."""

import threading

import click

from thinwire.comm.tcp_store import serve


@click.command()
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", default=29400, show_default=True, help="Port to listen on; 0 takes a free one.")
def store(host: str, port: int) -> None:
    """Keep the store at which groups of a fault-tolerant run meet, until it is interrupted.

    It holds a few kilobytes and never a model. Start it where it will not be killed, such as a login node; a run goes
    on without it for a while, and finds it again at the same address. It serves one run after another, and several at
    once if their launchers set different names in THINWIRE_RUN.
    """
    server = serve(host, port)
    click.echo(f"listening on {host}:{server.port}: start the groups with THINWIRE_STORE=HOST:{server.port}")
    threading.Event().wait()
