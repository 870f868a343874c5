"""Keys and values, allocated once and filled by appending, on the device or in host memory."""
