// `Via` (RFC 9110, section 7.6.3): the proxies that a call has passed. A deployment recognises its own pseudonym in the header,
// which all its replicas share, and so stops calls that loop back to it.

const CHARACTERS_MAX = 4096;
const HEADER = "via";

/** @param key a key of the deployment that is used for nothing else */
export const pseudonymOf = (key: Uint8Array): string => `tollgate-${key.toHex().slice(0, 16)}`;

/** Why a call with these headers is refused; null when it is not. */
export function viaProblem(headers: Headers, pseudonym: string): string | null {
  const via = headers.get(HEADER);
  if (via === null) return null;
  if (via.length > CHARACTERS_MAX) return `has a Via of more than ${CHARACTERS_MAX} characters`;
  const words = via.toLowerCase().split(/[\s,]+/);
  const times = words.filter((word) => word === pseudonym).length;
  return times > 3 ? `is a loop: it has passed this gateway ${times} times` : null;
}

export function viaHeader(headers: Headers, pseudonym: string): [name: string, value: string] {
  const own = `1.1 ${pseudonym}`;
  const via = headers.get(HEADER)?.trim() ?? "";
  return [HEADER, via === "" ? own : `${via}, ${own}`];
}
