"""``python -m baton.calibrate_double_sparsity``: writes the channels for --ds-channel-config-path."""

from __future__ import annotations

from collections.abc import Sequence

from .common.config.command import command


@command("calibrate_double_sparsity")
def main(argv: Sequence[str] | None = None) -> None:
    from .common.calibration import heavy_channels

    heavy_channels.main(argv)


if __name__ == "__main__":
    main()
