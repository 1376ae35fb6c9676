"""The cheapest classifiers of texts: the commonest label, the length, and a bag of words."""

import numpy as np

from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.language.labelled_text import LabelledTexts

features, linear_model = LazyModule("sklearn.feature_extraction.text"), LazyModule("sklearn.linear_model")
dummy, tree = LazyModule("sklearn.dummy"), LazyModule("sklearn.tree")


def baseline_accuracies(train: LabelledTexts, test: LabelledTexts) -> dict[str, float]:
    """Return the accuracy on the test rows of each baseline, fitted on the training rows.

    majority : the commonest label. length : a small tree on the number of characters and words. bag of words : a
    logistic regression on which words and pairs of words a text has.
    """
    majority = dummy.DummyClassifier(strategy="most_frequent").fit(_lengths(train), train.labels)
    by_length = tree.DecisionTreeClassifier(max_leaf_nodes=8, random_state=0).fit(_lengths(train), train.labels)
    words = features.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    words_of_train = words.fit_transform(train.texts)
    bag = linear_model.LogisticRegression(C=10.0, max_iter=1000).fit(words_of_train, train.labels)
    return {
        "majority": float(majority.score(_lengths(test), test.labels)),
        "length": float(by_length.score(_lengths(test), test.labels)),
        "bag of words": float(bag.score(words.transform(test.texts), test.labels)),
    }


def _lengths(rows: LabelledTexts) -> np.ndarray:
    return np.array([(len(text), len(text.split())) for text in rows.texts])
