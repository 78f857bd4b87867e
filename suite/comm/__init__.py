"""Axis 1: in what form values cross between processes.

    wire.py       one group of processes, a codec per direction, the byte counter: `Wire.run`, `Wire.start`
    meet.py       the differentiable collective that layouts are written with; opaque to torch.compile
    bytewise.py   all-reduce in one or two shots, reduce-scatter and all-gather of encoded bytes
    transport.py  the only file that calls torch.distributed's collectives
    counter.py    what crossed: `suite.record.Traffic` rows and a ledger of messages
    audit.py      sees every collective below the seam and compares it with the counter
    nonfinite.py  counts of NaN and Inf by site, shared by byte codecs
    native.py     shared by codecs that are a cast: bf16.py, fp32.py, fp64.py
    grouped.py    shared by codecs with scales a group: int8.py, fp8.py, int8_hadamard.py, int8_tensor.py, fp8_cast.py, tahquant.py
    taco.py       the paper's codec
"""
