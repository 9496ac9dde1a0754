"""What is measured: time, bytes, throughput."""
