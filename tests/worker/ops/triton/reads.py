"""Notes what the host reads of tensors by `tolist`, which no dispatch mode sees on a CPU."""

import torch


def note_reads(monkeypatch) -> list[torch.Size]:
    """Shapes of the tensors read from now on."""
    reads: list[torch.Size] = []
    read = torch.Tensor.tolist

    def tolist(tensor):
        reads.append(tensor.shape)
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    return reads
