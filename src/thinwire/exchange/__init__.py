"""What crosses the wire, and when: gradients, parameters, and what belongs to them."""
