"""How a server is reached: its address as it may be shown, the host it listens on, and the key that it wants."""

from __future__ import annotations

import os
import re

from specmeter.engines.base import ServerSpec
from specmeter.engines.flags import Command, flag_value
from specmeter.errors import SpecmeterError
from specmeter.trace.masking import MASK, mask_command

LOOPBACK = "127.0.0.1"
# A server that listens on every address is asked on loopback; uvicorn's `::` takes no IPv4.
_EVERY = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1", "[::]": "::1"}


def shown_url(url: str) -> str:
    """The address without what may be a secret, also where it is no address.

    That is what stands before an ``@`` (a user's name there may be a token, as a password is, and a password may hold
    any sign), what follows a ``?`` or ``#``, and what looks like a key.
    """
    scheme, sign, rest = url.partition("://")
    if not sign or "@" in scheme:
        scheme, sign, rest = "", "", url
    _, at, rest = rest.rpartition("@")
    place, *more = re.split("[?#]", rest, maxsplit=1)
    return mask_command([f"{scheme}{sign}{MASK if at else ''}{at}{place}{'?' + MASK if more else ''}"])[0]


def listening_host(command: Command) -> str:
    """The host at which the server of ``command`` is asked: that of ``--host``, or loopback."""
    host = flag_value(command, "--host") or ""
    return _EVERY.get(host, host).strip("[]")


def url_of(host: str, port: int) -> str:
    """The base URL of a server; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def key_headers(spec: ServerSpec) -> dict[str, str]:
    """The header with the server's key: from the variable that ``--api-key-env`` names, or the command's ``--api-key``.

    Empty where neither is there. Raises SpecmeterError, which names the variable alone, where it holds no key.
    """
    key = flag_value(spec.command, "--api-key")
    if spec.api_key_env is not None:
        key = spec.env.get(spec.api_key_env, os.environ.get(spec.api_key_env, ""))
        if not key or not (key.isascii() and key.isprintable()):
            raise SpecmeterError(
                f"--api-key-env names the variable {spec.api_key_env}, and it holds no key.",
                "It is not set, empty, or has characters that no HTTP header may have.",
                f"Set it: export {spec.api_key_env}=...",
            )
    return {"Authorization": f"Bearer {key}"} if key and key.isascii() and key.isprintable() else {}
