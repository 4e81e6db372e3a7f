"""Multi-hop question answering: question files, corpora, retrievers, scores, and the packaged default."""
