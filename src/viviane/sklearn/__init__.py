"""Estimators with scikit-learn's contract: from a table to a model in three lines.

import viviane as vv

clf = vv.CTRClassifier().fit(df, y)
clf.predict_proba(df_new)[:, 1]
"""

from viviane.core.optional import require

require("sklearn", extra="sklearn", purpose="an estimator")  # whose classes the modules below derive from

from viviane.sklearn.classifier import CTRClassifier  # noqa: E402
from viviane.sklearn.multitask import CTRMultiTaskClassifier  # noqa: E402
from viviane.sklearn.ranker import CTRRanker  # noqa: E402

__all__ = ["CTRClassifier", "CTRMultiTaskClassifier", "CTRRanker"]
