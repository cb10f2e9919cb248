"""Memory of anonymous files (memfd), which processes share."""

from __future__ import annotations

import errno
import os

_ADVICE = (
    "give the actors fewer bytes or the machine more; where `sysctl vm.overcommit_memory` is 2, raise "
    "vm.overcommit_ratio, or set vm.overcommit_memory to 0"
)


def reserve(fd: int, start: int, count: int) -> None:
    """Allocate the memory of a part of a memory file. Else a later write ends the process (SIGBUS) if there is none.

    Args:
        fd: Descriptor of the file, which grows if it is shorter.
        start: Offset of the part, in bytes.
        count: Bytes of the part.

    Raises:
        OSError: There is not enough memory. The text has the fix.
    """
    if not count:
        return
    try:
        os.posix_fallocate(fd, start, count)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            text = f"no memory for {count:,} more bytes that processes share: {_ADVICE}"
            raise OSError(errno.ENOMEM, text) from error
        raise
