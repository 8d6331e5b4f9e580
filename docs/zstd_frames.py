"""zstd frames that do not depend on the installed version of zstd (RFC 8878, section 3.1).

They are built by hand from raw blocks and blocks that repeat one byte. One is a stored result of a real compressor.
"""

MAX_BLOCK_BYTES = 1 << 17
RAW, REPEATED = 0, 1  # types of blocks
MAGIC = bytes.fromhex("28b52ffd")

# By zstd 1.5.7 at level 19, with Huffman-coded literals: `int8` of `write_vectors.few_values()`.
FROM_A_COMPRESSOR = bytes.fromhex("""
    28b52ffd60440015040016941e0bf059035f6d5d23b88074291c001c001700b582d298a9284a9ba1b1abea1e93e86245aa5baf997541f7e9
    0b08048b34b6be8e3645c5315a17673c26aa5b713315b366930651ec2ad10e27a631a6ed67164f4733dbc43fc6d95b77736a697caef7411b
    0f2a3aa3af3df5a85931639d7a513bb386f6d72fade85501000d0028
""")


def zstd_frame(content: bytes, *, declared: int | None = None, dictionary: int | None = None) -> bytes:
    """Return a frame of `content`, which should end with a repeated byte. `declared`: a wrong size to declare."""
    size = len(content) if declared is None else declared
    flags = 0xA0 | (dictionary is not None)  # the size in 4 bytes, one segment; 1 byte for the dictionary's number
    named = b"" if dictionary is None else bytes([dictionary])
    return MAGIC + bytes([flags]) + named + size.to_bytes(4, "little") + _blocks(content)


def frame_without_size(content: bytes) -> bytes:
    """Return a frame that does not declare its content's size; its window is 1 MiB."""
    return MAGIC + bytes([0x00, 10 << 3]) + _blocks(content)


def _blocks(content: bytes) -> bytes:
    head = content.rstrip(content[-1:])
    parts = [(RAW, head[at : at + MAX_BLOCK_BYTES]) for at in range(0, len(head), MAX_BLOCK_BYTES)]
    tail = content[len(head) :]
    parts += [(REPEATED, tail[at : at + MAX_BLOCK_BYTES]) for at in range(0, len(tail), MAX_BLOCK_BYTES)]
    blocks = b""
    for kind, part in parts:
        last = part is parts[-1][1]
        head_of_block = (len(part) << 3 | kind << 1 | last).to_bytes(3, "little")
        blocks += head_of_block + (part if kind == RAW else part[:1])
    return blocks
