"""Steps, blocks and streams: what a reversible network is made of."""
