"""Carries messages and tensors between the two ranks.

`control` sends typed messages over ZMQ. `link` holds the three tensor channels of a pair of ranks:
`gloo` between CPUs, `nccl` or copies into the `peer`'s memory between GPUs.
"""
