// The language of the search field: words, and terms such as `dtype:bf16`, `rank:3`, `size:>1MB`; `-` negates a term.

const DTYPE_NAMES = Object.fromEntries(
  Object.entries(SHORT_DTYPES).flatMap(([long, short]) => [
    [short, long],
    [short.replace(/^f/, "fp"), long],
  ]),
);
const SIZE = /^([<>]=?|=)?([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)i?b?$/i;
const QUERY_TERMS = "dtype: rank: dims: shape: size: layout: kind: is:";

/** A query as a list of tests, and what is wrong with it. */
function parseQuery(text) {
  const tests = [];
  let problem = "";
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const negated = word.length > 1 && word.startsWith("-");
    const term = negated ? word.slice(1) : word;
    const colon = term.indexOf(":");
    const name = colon > 0 ? term.slice(0, colon).toLowerCase() : "";
    const make = Object.hasOwn(TERMS, name) ? TERMS[name] : null;
    const value = term.slice(colon + 1);
    if (make && value === "") continue;
    const test = make ? make(value) : containing(term);
    if (test === null) problem = `“${shortened(term, 30)}” is not understood`;
    else tests.push(negated ? (leaf) => !test(leaf) : test);
  }
  return { tests, problem, matches: (leaf) => tests.every((test) => test(leaf)) };
}

function containing(word) {
  const wanted = word.toLowerCase();
  return (leaf) => leaf.lower.includes(wanted);
}

const TERMS = {
  dtype: (value) => {
    const lower = value.toLowerCase();
    const wanted = Object.hasOwn(DTYPE_NAMES, lower) ? DTYPE_NAMES[lower] : lower;
    return (leaf) => leaf.kind === "tensor" && leaf.tensor().dtype.startsWith(wanted);
  },
  rank: (value) => {
    if (!/^[0-9]+$/.test(value)) return null;
    return (leaf) => leaf.isHeldBy(Number(value));
  },
  dims: (value) => {
    if (!/^[0-9]+$/.test(value)) return null;
    return (leaf) => leaf.kind === "tensor" && leaf.tensor().shape.length === Number(value);
  },
  shape: (value) => {
    const wanted = value.split(/[x×,*]/).map((size) => (size === "" || size === "?" ? null : Number(size)));
    if (wanted.some((size) => Number.isNaN(size))) return null;
    return (leaf) => {
      const shape = leaf.kind === "tensor" ? leaf.tensor().shape : null;
      return shape !== null && shape.length === wanted.length && wanted.every((n, d) => n === null || n === shape[d]);
    };
  },
  size: (value) => {
    const found = SIZE.exec(value);
    if (!found) return null;
    const limit = Number(found[2]) * 1000 ** " kmgtp".indexOf(found[3].toLowerCase() || " ");
    const compare =
      {
        "<": (n) => n < limit,
        "<=": (n) => n <= limit,
        ">": (n) => n > limit,
        ">=": (n) => n >= limit,
      }[found[1]] ?? ((n) => n === limit);
    return (leaf) => leaf.kind === "tensor" && compare(leaf.tensor().bytes);
  },
  layout: (value) => (leaf) => leaf.layoutKind() === value.toLowerCase(),
  kind: (value) => (leaf) => leaf.kind.startsWith(value.toLowerCase().replace("private", "per_rank")),
  is: (value) => {
    const wanted = value.toLowerCase();
    if (wanted === "tied") return (leaf) => leaf.kind === "tensor" && leaf.tensor().sameAs !== "";
    if (wanted === "nan" || wanted === "inf" || wanted === "unhealthy") return (leaf) => leaf.isOdd(wanted);
    return null;
  },
};
