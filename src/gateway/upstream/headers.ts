// The headers that the gateway itself puts into a request to an upstream.
import { credentialProblem } from "./failure.ts";

/** The header that carries a credential. */
export interface CredentialHeader {
  readonly name: string;
  readonly value: string;
}

type HeaderList = Array<[name: string, value: string]>;

/** What can stand in a header: visible Latin-1, space and tab (RFC 9110, section 5.5). */
const HEADER_VALUE = /^[\t\x20-\x7e\x80-\xff]*$/;

/** @throws CallError `credential_error` when no header can carry it */
export function credentialHeaders(credential: CredentialHeader | null): HeaderList {
  if (credential === null) return [];
  if (!HEADER_VALUE.test(credential.value)) {
    throw credentialProblem("the secret holds characters that no header can carry");
  }
  return [[credential.name, credential.value]];
}

/** @param invocationId null for a connection that is no invocation */
export function ownHeaders(requestId: string, invocationId: string | null): HeaderList {
  const own: HeaderList = [["x-request-id", requestId]];
  if (invocationId !== null) own.push(["x-service-invocation-id", invocationId]);
  return own;
}
