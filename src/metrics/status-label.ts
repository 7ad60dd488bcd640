// The label of an HTTP status. On the streaming path the upstream chooses the status, so only those with a meaning
// (IANA's registry, RFC 9110) have a value of their own.
const ASSIGNED: readonly (readonly [from: number, to: number])[] = [
  [100, 103],
  [200, 208],
  [226, 226],
  [300, 308],
  [400, 417],
  [421, 426],
  [428, 429],
  [431, 431],
  [451, 451],
  [500, 508],
  [510, 511],
];

const LABELS = new Map(
  ASSIGNED.flatMap(([from, to]) =>
    Array.from({ length: to - from + 1 }, (_, at) => [from + at, `${from + at}`] as const),
  ),
);

export function statusLabel(status: number): string {
  return LABELS.get(status) ?? `${Math.floor(status / 100)}xx`;
}
