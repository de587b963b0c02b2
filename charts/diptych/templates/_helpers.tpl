{{/* Name of the chart, short enough for the longest suffix that is put behind it. */}}
{{- define "diptych.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of this release of the chart: "diptych" for a release of that name. */}}
{{- define "diptych.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "diptych.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "diptych.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of the operator's objects. */}}
{{- define "diptych.operator" -}}
{{- include "diptych.fullname" . }}-operator
{{- end -}}

{{/* Name of what is not in a namespace: two releases of one name may live in two namespaces. */}}
{{- define "diptych.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "diptych.operator" .) -}}
{{- end -}}

{{- define "diptych.serviceAccount" -}}
{{- default (include "diptych.operator" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/*
The labels that pick the operator's pods; a Deployment can never change them. The first is fixed: by
it the NetworkPolicies that the operator makes know who may call the admin ports of engines.
*/}}
{{- define "diptych.selector" -}}
app.kubernetes.io/name: diptych-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. Helm itself adds app.kubernetes.io/managed-by. */}}
{{- define "diptych.labels" -}}
{{- $ours := dict "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- toYaml (merge (include "diptych.selector" . | fromYaml) $ours (default dict .Values.commonLabels)) -}}
{{- end -}}

{{/* Name of what `helm test` makes: 40 characters are the most that a service's may have. */}}
{{- define "diptych.test" -}}
{{- include "diptych.fullname" . | trunc 35 | trimSuffix "-" }}-test
{{- end -}}

{{/*
Labels of what is not the operator's, so that no selector of the operator's picks it: (list $ "test")
for what `helm test` makes, (list $ "images") for what fetches images.
*/}}
{{- define "diptych.labelsOf" -}}
{{- $root := first . -}}
{{- $ours := dict "app.kubernetes.io/instance" $root.Release.Name -}}
{{- $ours = set $ours "app.kubernetes.io/name" (printf "diptych-%s" (last .)) -}}
{{- toYaml (merge $ours (default dict $root.Values.commonLabels)) -}}
{{- end -}}

{{/* The image of a component: (list $ "operator"), (list $ "engine") and so on. */}}
{{- define "diptych.image" -}}
{{- $root := first . -}}
{{- $image := index $root.Values.images (last .) -}}
{{- $registry := default $root.Values.images.registry $root.Values.global.imageRegistry -}}
{{- with $registry -}}{{ trimSuffix "/" . }}/{{- end -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* What the "restricted" Pod Security Standard asks of a pod, and over it the value. */}}
{{- define "diptych.podSecurityContext" -}}
{{- $ours := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if not .Values.clusterChoosesUser -}}
{{- $ours = merge $ours (dict "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $ours (default dict .Values.securityContext)) -}}
{{- end -}}

{{/* What it asks of a container, a read-only file system, and over it the value. */}}
{{- define "diptych.containerSecurityContext" -}}
{{- $ours := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $ours = merge $ours (dict "capabilities" (dict "drop" (list "ALL"))) -}}
{{- toYaml (mergeOverwrite $ours (default dict .Values.containerSecurityContext)) -}}
{{- end -}}

{{/* The fields that say on which nodes the operator's pods and that of the test may run. */}}
{{- define "diptych.placement" -}}
{{- range $field := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" }}
{{- with index $.Values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What a container has that only has to be there. */}}
{{- define "diptych.idles" -}}
resources:
  requests:
    cpu: 1m
    memory: 16Mi
  limits:
    memory: 64Mi
securityContext:
  {{- include "diptych.containerSecurityContext" . | nindent 2 }}
{{- end -}}
