"""Groups of int8 and int4 weights with a scale and a minimum each."""
