"""Matrix products of few rows on the CPU, at the speed of its memory: compiled for the host when weights are packed."""
