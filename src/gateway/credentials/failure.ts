// Why a secret could not be resolved. The message is for the log: it names places and statuses, and never any
// part of a secret. The caller of the agent learns `credential_error` and no more.

export class CredentialFailure extends Error {
  override readonly name = "CredentialFailure";
}
