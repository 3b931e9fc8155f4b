"""Starts the unmodified jtop service on a fake board. Runs inside the board's mount namespace, as ROOT/launch/jtop.

Three things that a Jetson's kernel or hardware gives and files cannot are supplied before jtop is imported: the
machine's name, the module's EEPROM on I2C, and the prefix under which jtop keeps its config.json (so that nothing
outside is written).
"""

import json
import platform
import sys
from pathlib import Path

root = Path(sys.argv[0]).resolve().parent.parent
platform.machine = lambda: "aarch64"
sys.base_prefix = str(root / "prefix")

import smbus2  # noqa: E402  (after the patches above)

eeprom = json.loads((root / "eeprom.json").read_text())


class SMBus:
    """One module EEPROM at 0x50; its part number starts at byte 20."""

    def __init__(self, bus, force=False):
        if bus != eeprom["bus"]:
            raise OSError(2, "no such bus")

    def read_i2c_block_data(self, address, register, length):
        if address != 0x50:
            raise OSError(121, "Remote I/O error")
        image = bytearray(b"\xff" * 256)
        part = eeprom["part"].encode().ljust(30, b"\0")
        image[20 : 20 + len(part)] = part
        return list(image[register : register + length])


smbus2.SMBus = SMBus
sys.argv = ["jtop", "--force"]

from jtop.__main__ import main  # noqa: E402

main()
