"""Host side: pipelines on GPUs and on virtual devices."""
