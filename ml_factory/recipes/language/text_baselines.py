"""The cheapest classifiers of texts: the commonest label, the length, and a bag of words."""

from collections import Counter

import numpy as np

from ml_factory.evaluation.class_scores import accuracy
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.language.labelled_text import LabelledTexts

features, linear_model, tree = (
    LazyModule("sklearn.feature_extraction.text"),
    LazyModule("sklearn.linear_model"),
    LazyModule("sklearn.tree"),
)


def baseline_accuracies(train: LabelledTexts, test: LabelledTexts) -> dict[str, float]:
    """Return the accuracy on the test rows of each baseline, fitted on the training rows.

    majority : the commonest label. length : a small tree on the number of characters and words. bag of words : a
    logistic regression on which words and pairs of words a text has.
    """
    common = Counter(train.labels).most_common(1)[0][0]
    by_length = tree.DecisionTreeClassifier(max_leaf_nodes=8, random_state=0).fit(_lengths(train), train.labels)
    words = features.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    words_of_train = words.fit_transform(train.texts)
    bag = linear_model.LogisticRegression(C=10.0, max_iter=1000).fit(words_of_train, train.labels)
    return {
        "majority": accuracy(test.labels, [common] * len(test)),
        "length": accuracy(test.labels, by_length.predict(_lengths(test)).tolist()),
        "bag of words": accuracy(test.labels, bag.predict(words.transform(test.texts)).tolist()),
    }


def _lengths(rows: LabelledTexts) -> np.ndarray:
    return np.array([(len(text), len(text.split())) for text in rows.texts])
