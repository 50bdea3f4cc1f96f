"""What several processes share: configuration, logging, clients."""
