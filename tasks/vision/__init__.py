"""Questions about images: the constructors that a gin configuration names."""

from tasks.vision.image_questions import NO_KIND, questions, random_questions

__all__ = ["NO_KIND", "questions", "random_questions"]
