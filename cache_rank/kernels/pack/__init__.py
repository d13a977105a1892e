"""What a layer computes is packed into the message to the cache rank."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.pack import reference

pack_layer = by_device(reference.pack_layer)
pack_hidden = by_device(reference.pack_hidden)
stamp = by_device(reference.stamp)
