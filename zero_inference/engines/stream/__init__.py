"""Our layer streaming: decoder layers wait in page-locked host memory and pass through a ring of device slots."""
