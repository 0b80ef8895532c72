"""What a trained model says about examples: batch inference to files."""
