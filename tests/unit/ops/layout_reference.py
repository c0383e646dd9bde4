"""A slow decoder of packed weights, and an encoder of the formats whose bytes are prescribed, written from docs/container.md alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BLOCK_BYTES = {"f32": 4096, "bf16": 2048, "int8": 1088, "int4": 576}
QUANTISED = ("int8", "int4")


def packed_size(fmt: str, n: int, k: int) -> int:
    return -(-n // 32) * -(-k // 32) * BLOCK_BYTES[fmt]


def element(fmt: str, r: int, k: int) -> int:
    """Byte offset in a block of row r's column k; of the byte that holds the nibble for int4."""
    half, lane = divmod(r, 16)
    if fmt == "f32":
        return k * 128 + half * 64 + lane * 4
    if fmt == "bf16":
        return k // 2 * 128 + half * 64 + lane * 4 + k % 2 * 2
    if fmt == "int8":
        return 64 + k // 4 * 128 + half * 64 + lane * 4 + k % 4
    return 64 + k // 8 * 128 + half * 64 + lane * 4 + k % 4


def decode_block(fmt: str, block: bytes) -> F32:
    """[32, 32], dequantised."""
    out = np.zeros((32, 32), np.float32)
    scales = np.frombuffer(block[:64], "<f2").astype(np.float32) if fmt in QUANTISED else np.ones(32, np.float32)
    for r in range(32):
        for k in range(32):
            at = element(fmt, r, k)
            if fmt == "f32":
                out[r, k] = np.frombuffer(block[at : at + 4], "<f4")[0]
            elif fmt == "bf16":
                out[r, k] = np.frombuffer(b"\0\0" + block[at : at + 2], "<f4")[0]
            elif fmt == "int8":
                out[r, k] = scales[r] * np.float32(np.frombuffer(block[at : at + 1], np.int8)[0])
            else:
                nibble = block[at] >> 4 if k % 8 >= 4 else block[at] & 15
                out[r, k] = scales[r] * np.float32(nibble - 8)
    return out


def decode(fmt: str, packed: bytes, n: int, k: int) -> F32:
    """[n, k], and the padding checked to be zero."""
    panels, groups = -(-n // 32), -(-k // 32)
    size = BLOCK_BYTES[fmt]
    blocks = [decode_block(fmt, packed[index * size : (index + 1) * size]) for index in range(panels * groups)]
    whole = np.block([[blocks[panel * groups + group] for group in range(groups)] for panel in range(panels)])
    assert not whole[n:].any(), "padding rows are not zero"
    assert not whole[:, k:].any(), "padding columns are not zero"
    return whole[:n, :k]


def decode_expert(fmt: str, packed: bytes, hidden: int, ffn: int) -> tuple[F32, F32, F32]:
    """gate, up [ffn, hidden] and down [hidden, ffn]."""
    neurons = -(-ffn // 32) * 32
    fused_rows = 2 * neurons
    fused_bytes = packed_size(fmt, fused_rows, hidden)
    fused = decode(fmt, packed[:fused_bytes], fused_rows, hidden).reshape(-1, 2, 16, hidden)
    gate, up = fused[:, 0].reshape(-1, hidden), fused[:, 1].reshape(-1, hidden)
    assert not gate[ffn:].any(), "padding gate rows are not zero"
    assert not up[ffn:].any(), "padding up rows are not zero"
    return gate[:ffn], up[:ffn], decode(fmt, packed[fused_bytes:], hidden, ffn)


def encode(fmt: str, w: F32) -> bytes:
    """f32, bf16 (nearest even) and int8 (scale amax / 127 as fp16, nearest even), whose bytes are prescribed."""
    n, k = w.shape
    whole = np.zeros((-(-n // 32) * 32, -(-k // 32) * 32), np.float32)
    whole[:n, :k] = w
    blocks = []
    for row in range(0, whole.shape[0], 32):
        for column in range(0, whole.shape[1], 32):
            blocks.append(encode_block(fmt, whole[row : row + 32, column : column + 32]))
    return b"".join(blocks)


def encode_block(fmt: str, block: F32) -> bytes:
    out = bytearray(BLOCK_BYTES[fmt])
    values: NDArray[np.generic] = block
    if fmt == "bf16":
        bits = block.view(np.uint32)
        values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    elif fmt == "int8":
        amax = np.abs(block).max(axis=1)
        scales = np.where(amax > 0, amax / np.float32(127), np.float32(1)).astype("<f2")
        out[:64] = scales.tobytes()
        values = np.clip(np.rint(block * (np.float32(1) / scales.astype(np.float32))[:, None]), -127, 127).astype(np.int8)
    for r in range(32):
        for k in range(32):
            at, data = element(fmt, r, k), values[r, k].tobytes()
            out[at : at + len(data)] = data
    return bytes(out)
