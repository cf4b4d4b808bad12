"""How the demo checkpoint was made: a small text-to-image model, trained on a CPU from a freely licensed emoji set."""
