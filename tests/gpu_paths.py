CARDS = {  # (name, compute capability, GiB of memory, multiprocessors)
    "P100": ("Tesla P100-PCIE-16GB", (6, 0), 15.89, 56),
    "V100": ("Tesla V100-SXM2-16GB", (7, 0), 15.77, 80),
    "T4": ("Tesla T4", (7, 5), 14.56, 40),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 79.15, 108),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 23.52, 128),
    "L4": ("NVIDIA L4", (8, 9), 21.95, 58),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 79.10, 132),
    "B200": ("NVIDIA B200", (10, 0), 178.0, 148),
    "5090": ("NVIDIA GeForce RTX 5090", (12, 0), 31.36, 170),
}
