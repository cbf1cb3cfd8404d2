{{- define "baton.name" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* What a selector may hold: constant over upgrades. Argument: root, component. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- define "baton.key" -}}
- name: {{ .env }}
  valueFrom:
    secretKeyRef: {name: {{ .root.Values.secrets.keys | quote }}, key: {{ .key }}}
{{- end }}

{{- /* The pod of a server. Argument: root, role, pool, component, leader (false: further hosts of one server). */}}
{{- define "baton.serverPod" -}}
serviceAccountName: {{ include "baton.name" .root }}-server
automountServiceAccountToken: false
# The drain, 5 s for the ranks, and 15 s to spare.
terminationGracePeriodSeconds: {{ add .pool.shutdownGraceSeconds 20 }}
securityContext:
  runAsNonRoot: true
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .pool.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .pool.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .pool.topologyKey }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .pool.topologyKey | quote }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
{{- end }}
containers:
  - name: server
    image: {{ .root.Values.images.engine | quote }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    command: [{{ if eq .role "unified" }}launch_server{{ else }}launch_{{ .role }}{{ end }}]
    args:
      - {{ printf "--model-path=%s" .root.Values.model | quote }}
      {{- with .root.Values.servedModelName }}
      - {{ printf "--served-model-name=%s" . | quote }}
      {{- end }}
      {{- if gt (int .pool.nodes) 1 }}
      - --host=$(POD_IP)
      - --nnodes={{ .pool.nodes }}
      - --node-rank=$(NODE_RANK)
      - --dist-init-addr=$(LWS_LEADER_ADDRESS):5000
      {{- else }}
      - --host=0.0.0.0
      {{- end }}
      - --port=30000
      - --tp-size={{ .pool.tpSize }}
      {{- if eq .role "prefill" }}
      - --disaggregation-bootstrap-port={{ .pool.bootstrapPort }}
      {{- end }}
      - --shutdown-grace-secs={{ .pool.shutdownGraceSeconds }}
      - --api-key=$(WORKER_API_KEY)
      {{- if ne .role "unified" }}
      - --cluster-secret=$(CLUSTER_SECRET)
      {{- end }}
      {{- range .pool.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    env:
      {{- include "baton.key" (dict "root" .root "env" "WORKER_API_KEY" "key" "worker-api-key") | nindent 6 }}
      {{- if ne .role "unified" }}
      {{- include "baton.key" (dict "root" .root "env" "CLUSTER_SECRET" "key" "cluster-secret") | nindent 6 }}
      {{- end }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .root.Values.secrets.huggingFace | quote }}, key: token, optional: true}
      {{- if gt (int .pool.nodes) 1 }}
      - name: POD_IP
        valueFrom:
          fieldRef: {fieldPath: status.podIP}
      - name: NODE_RANK
        valueFrom:
          fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}
      {{- end }}
      {{- with .pool.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - {name: http, containerPort: 30000}
      {{- if eq .role "prefill" }}
      - {name: bootstrap, containerPort: {{ .pool.bootstrapPort }}}
      {{- end }}
    {{- if .leader }}
    # /health answers 503 while weights load.
    startupProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ div .pool.startupSeconds 5 }}
    readinessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    {{- end }}
    resources:
      {{- with .pool.resources.requests }}
      requests:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if or .pool.resources.limits .pool.gpuResource .pool.rdma.resource }}
      limits:
        {{- with .pool.resources.limits }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if .pool.gpuResource }}
        {{ .pool.gpuResource }}: {{ div .pool.tpSize .pool.nodes | quote }}
        {{- end }}
        {{- if .pool.rdma.resource }}
        {{ .pool.rdma.resource }}: {{ .pool.rdma.count | quote }}
        {{- end }}
      {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      capabilities:
        drop: [ALL]
        {{- if .pool.rdma.resource }}
        # RDMA registers memory, which pins it.
        add: [IPC_LOCK]
        {{- end }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: shm, mountPath: /dev/shm}
volumes:
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .pool.shmSize }}}
  {{- if .pool.models.existingClaim }}
  - name: models
    persistentVolumeClaim: {claimName: {{ .pool.models.existingClaim | quote }}}
  {{- else if or (not .pool.models.size) (gt (int .pool.nodes) 1) }}
  - name: models
    emptyDir: {}
  {{- end }}
{{- end }}

{{- define "baton.scaleTarget" -}}
{{- if gt (int .pool.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: StatefulSet
{{- end }}
name: {{ include "baton.name" .root }}-{{ .role }}
{{- end }}

{{- /* A selector of all pods of servers. */}}
{{- define "baton.servers" -}}
matchLabels:
  app.kubernetes.io/name: baton
  app.kubernetes.io/instance: {{ .Release.Name | quote }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [prefill, prefill-host, decode, decode-host, unified, unified-host]
{{- end }}
