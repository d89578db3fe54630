"""``python -m service``: the HTTP process. ``launcher.serve`` starts it, and the ranks beside it.

The API key comes in the environment (``MEGAMOE_API_KEY``, or the name of a file in
``MEGAMOE_API_KEY_FILE``): arguments can be read by every user of the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from service.config import ConfigError, ServiceConfig
from service.server import EXIT_SETTING, run

__all__ = ["main", "read_key"]


def read_key() -> str | None:
    """The API key from the environment, or None.

    Raises:
        ConfigError: the key file cannot be read, or holds no text.
    """
    name = os.environ.get("MEGAMOE_API_KEY_FILE")
    if not name:
        return os.environ.get("MEGAMOE_API_KEY") or None
    try:
        return Path(name).read_text().strip()
    except OSError as error:
        raise ConfigError(f"the API key's file {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"the API key's file {name} is no text: give one that holds a key"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Parses arguments and serves."""
    parser = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    parser.add_argument("--config", default="{}", help="ServiceConfig fields as JSON")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--follow-pid", type=int, default=None)
    args = parser.parse_args(argv)
    try:
        fields = msgspec.json.decode(args.config, type=dict[str, str | int | float | bool])
        config = ServiceConfig(**{**fields, "api_key": read_key()})  # type: ignore[arg-type]
    except (ConfigError, msgspec.DecodeError, TypeError) as error:
        print(f"megamoe serve: {error}", file=sys.stderr)
        return EXIT_SETTING
    return run(config, args.run_dir, args.follow_pid)


if __name__ == "__main__":
    sys.exit(main())
