"""Peak memory bandwidth of cards by the names that their drivers give them, from the makers' data sheets."""

from __future__ import annotations

import re

# The first pattern found in the name wins; GB/s are 10^9 bytes a second. A real kernel reaches 80 to 93 % of a peak, so
# a time computed from it is a bound from below.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GH200.*144", 4900.0),
    (r"GH200", 4000.0),
    (r"B300", 8000.0),
    (r"B200", 8000.0),
    (r"H200", 4800.0),
    (r"H100 NVL", 3900.0),
    (r"H100 PCIe", 2000.0),
    (r"H100|H800", 3350.0),
    (r"H20\b", 4000.0),
    (r"A100.*PCIe.*80", 1935.0),
    (r"A(100|800).*80", 2039.0),
    (r"A100", 1555.0),
    (r"L40S?\b", 864.0),
    (r"L4\b", 300.0),
    (r"A10\b", 600.0),
    (r"RTX 5090", 1792.0),
    (r"RTX 4090", 1008.0),
    (r"MI325X", 6000.0),
    (r"MI300X", 5300.0),
)


def peak_gb_s(device: str) -> float | None:
    """The peak of a card by its name, GB/s; None for one that is not listed."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device, re.IGNORECASE)), None)
