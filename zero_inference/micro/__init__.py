"""Where the time of a transformer layer goes: matrix products, element-wise operations, whole layers and their parts."""
