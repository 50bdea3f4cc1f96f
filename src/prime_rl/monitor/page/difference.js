// Difference of two texts: their longest common subsequence of characters, or of words where one is much longer.

const MAX_CELLS = 4e6; // of the table; longer texts are not compared
const CHARACTERS = /<\/?\w+>|[\s\S]/gu, WORDS = /<\/?\w+>|\s+|\w+|[^\w\s]/gu;

// Both texts as nodes: parts of `expected` that `text` lacks are marked as missing, parts of `text` from `expected` as same.
function difference(expected, text) {
  const isSimilar = text.length <= 3 * expected.length && expected.length * text.length <= MAX_CELLS;
  const a = expected.match(isSimilar ? CHARACTERS : WORDS) || [], b = text.match(isSimilar ? CHARACTERS : WORDS) || [];
  if (a.length * b.length > MAX_CELLS) return { left: expected, right: text, isComplete: text.includes(expected) };
  const [inA, inB] = commonParts(a, b);
  return { left: marked(a, inA, "", "missing"), right: marked(b, inB, "same", ""), isComplete: a.every((part, i) => inA[i] || !part.trim()) };
}

// Whether each part of `a` and of `b` belongs to the longest common subsequence.
function commonParts(a, b) {
  const width = b.length + 1, longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
    longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  const inA = a.map(() => false), inB = b.map(() => false);
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) inA[i++] = inB[j++] = true;
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return [inA, inB];
}

// Neighboring parts of the same kind are one node.
function marked(parts, isCommon, common, other) {
  const nodes = [];
  for (let start = 0, end = 0; start < parts.length; start = end) {
    while (end < parts.length && isCommon[end] === isCommon[start]) end++;
    const text = parts.slice(start, end).join(""), kind = isCommon[start] ? common : other;
    nodes.push(kind ? el("mark", { class: kind }, text) : text);
  }
  return nodes;
}
