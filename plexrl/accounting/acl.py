"""POSIX ACLs without setfacl: the value of the extended attribute system.posix_acl_access.

Layout (linux/posix_acl_xattr.h): u32 version 2, then per entry u16 tag, u16 permissions, u32 id, little-endian, sorted
by tag and id.
"""

import errno
import os
import struct
import warnings
from collections.abc import Collection

_ATTRIBUTE = "system.posix_acl_access"
_ANY_ID = 0xFFFFFFFF
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE = 4, 2


class NoAcl(UserWarning):
    """The file system keeps no POSIX ACLs: only the pool's own account and root can read its reports."""


def readable_by(*uids: int) -> bytes:
    """The ACL u::rw-,u:UID:r-- of each,g::---,m::r--,o::---."""
    entries = (
        (_USER_OBJ, _READ | _WRITE, _ANY_ID),
        *((_USER, _READ, uid) for uid in sorted(uids)),
        (_GROUP_OBJ, 0, _ANY_ID),
        (_MASK, _READ, _ANY_ID),
        (_OTHER, 0, _ANY_ID),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def let_read(fd: int, uids: Collection[int], where: str) -> None:
    """Give users read access to an open file of ours. Where there are no ACLs: a NoAcl warning, and no access."""
    others = set(uids) - {os.fstat(fd).st_uid}
    if not others:
        return
    try:
        os.setxattr(fd, _ATTRIBUTE, readable_by(*others))
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        warnings.warn(
            f"{where} is on a file system without POSIX ACLs: users cannot read their reports there. "
            "Put the reports on one that has them",
            NoAcl,
            stacklevel=2,
        )
